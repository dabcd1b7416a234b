"""Processes of a run that live in another job or on another machine, or outlive the controller that started them."""

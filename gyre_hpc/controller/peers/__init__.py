"""The controller's peers as processes and links, the nodes they are on, and the channels to them."""

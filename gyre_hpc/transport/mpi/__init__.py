"""MPI channels and regions beside the sockets. MPI lives in disposable endpoint processes alone (endpoint.py)."""

"""The load harness against a router, through the SDK alone."""

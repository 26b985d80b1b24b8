"""Tests of the wire: `chiasm.rpc`."""

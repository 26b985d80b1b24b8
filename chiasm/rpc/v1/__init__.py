"""Generated from `proto/chiasm/rpc/v1` by `make proto`. Do not edit."""

"""The wire: generated messages (`v1`), errors as statuses (`status`), limits, one server and one channel.

It knows gRPC and the error classes. It does not know a model, a medium or a tensor, and it never loads torch.
"""

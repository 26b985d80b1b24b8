"""The wire: generated messages (`v1`), errors as statuses (`status`), limits, one server, one channel, calls over it;
and the life of a process that serves (`process`), with its plain HTTP port (`http`).

It knows gRPC and the error classes. It does not know a model, a medium or a tensor, and it never loads torch.
"""

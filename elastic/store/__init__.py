"""Connects to the coordinator: one contract, implemented over etcd and, for tests, in memory.

Importing this package loads neither gRPC nor protobuf.
"""

"""The coordinator: a contract, etcd behind it, and one in memory for tests. Importing this loads neither gRPC nor protobuf."""

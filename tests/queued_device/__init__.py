"""A device and a back end for tests on a CPU that behave as a GPU and NCCL do, abort included."""

"""Tensors between processes of one machine: slots of shared memory, who may read and write them, and when."""

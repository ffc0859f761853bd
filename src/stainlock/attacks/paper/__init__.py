"""The attacks reported in the paper, one file each; `nafnet` is a network that one of them uses."""

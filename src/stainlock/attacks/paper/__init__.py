"""The attacks that the paper reports, one file each; `nafnet` is a network that one of them uses."""

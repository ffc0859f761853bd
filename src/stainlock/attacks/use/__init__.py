"""What happens to models and pictures in ordinary use, one file each; `none` is the unchanged model."""

"""What happens to models and pictures in ordinary use, one file each; `none` is the model as it is."""

"""Reading and writing: `files` for our own formats, `weights` for weight files from anywhere."""

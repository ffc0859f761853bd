"""What a thief tries who has read this code, one file each; `gate_blocks` and `guessed_patch` serve several."""

"""What a thief tries who has read this code, one file each; `gate_blocks`, `guessed_patch`,
`keyed_gates` and `assignment` serve several."""

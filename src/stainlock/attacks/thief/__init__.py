"""Attacks by a thief who has read this code, one file each; `gate_blocks`, `guessed_patch`, `keyed_gates` and
`assignment` are shared by several."""

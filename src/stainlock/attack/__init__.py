"""Attacks: what someone without the key may try, one file each."""

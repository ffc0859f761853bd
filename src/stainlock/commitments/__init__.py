"""Commitments: a signed digest of key and model that reveals neither. Its date can later decide who was first.

docs/commitments.md explains what a commitment proves and why it is designed this way. `commitment` is the file,
`opening` how key and model are sealed in it, `signing` the signature, `evidence` timestamps and logs, `check` what all
this shows. `log_head` is the same for the audit log of a registry of clients, and `signed` what both files share.
Nothing is imported here: signing a log needs no torch, and must not load it.
"""

"""Clients: who has which copy of a model, and who leaked one.

`secrets` derives everything from one master secret, `database` and `records` keep names and dates, `log` chains what
was done. `copies` makes a client's copy, `issuing` writes copies to the disk, `tracing` finds the leaker of a suspect,
`evidence` and `page` put the answer into the hands of others, and `checking` computes it again. `registry` is the door
to all of it, `ledger` the part of it that needs no model.
"""

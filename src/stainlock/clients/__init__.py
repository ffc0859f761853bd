"""Clients: who has which copy of a model, and who leaked one.

`secrets` derives everything from one master secret, `database` and `records` store names and dates, and `log` is the
hash-chained audit log. `copies` makes a client's copy, `issuing` writes copies to disk, and `tracing` finds whose copy
a suspect is. `evidence` and `page` present the answer to others, and `checking` recomputes it. `registry` is the entry
point to all of it, `ledger` the part that needs no model.
"""

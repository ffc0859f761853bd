"""What the locks of convolutional networks are made of.

`settings` are the owner's choices. `site_choice`, `detectors` and `several` are about the patch and who sees it,
`route`, `channel_cost`, `conduit`, `wiring`, `folding` and `disguise` about the signal's way, `hosts`, `placement` and
`gates` about what it switches.
"""

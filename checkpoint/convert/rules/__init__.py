"""Maps names and layouts of one spelling of a model to another. Pure, but for `presets`.

`rule_file` parses rules from TOML, `plan` applies them to the tensors of a checkpoint, and `views`
says where each element of a target lies in the sources.
"""

"""Attaches the loops of other frameworks; each module imports its framework, and nothing else does.

`keepstep` itself imports none of them: a script imports the module of the framework that it uses.
"""

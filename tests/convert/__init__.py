"""Tries the readers and writers of other tools' checkpoints with the tools themselves.

    make convert-test                                   # all of them
    make convert-test ONLY="transformers peft"          # some
    python -m tests.convert.transformers                # one, where its libraries are installed

Every module here that has a constant REQUIREMENTS makes checkpoints with the libraries that it
names, and checks what keepstep reads of them and what the libraries read of keepstep's. It prints a
line per check and exits with 1 if one has failed. `python -m tests.convert` makes the environments:
`.venv-convert-NAME`, or in the folder that `--environments` names. NAME is the module's, or its
constant ENVIRONMENT, which modules share whose libraries agree. An environment has what the one has
that runs the command, and the libraries; constraints.txt holds for them.

These checks need minutes and the libraries, and so are no part of `make test`, which reads small
files that the same libraries wrote (`tests/foreign_fixtures`).
"""

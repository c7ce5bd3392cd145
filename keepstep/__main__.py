"""Runs the `keepstep` command as `python -m keepstep`."""

from keepstep.elastic.cli.main import main

if __name__ == "__main__":
    main(prog_name="keepstep")

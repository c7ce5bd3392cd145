"""`python -m keepstep`: the `keepstep` command."""

from keepstep.elastic.cli.main import main

if __name__ == "__main__":
    main(prog_name="keepstep")

"""The hostile test: what a user's mistake, a bad file or a bad moment could do to the project.

    make hostile                                       all parts, under 15 minutes on two cores
    python -m tests.hostile --part files --seed 3      one part, with other random choices
    python -m tests.hostile --part files --only 120    one case again, with all that it prints

It is no part of `make test`. It works on a copy of the tracked files, in a temporary folder.

    commands.py   THE table of commands. A new command is added there; its flags are read from it
    sandbox.py    runs each case in a process of its own, and judges how it ended
    arguments.py  malformed command lines            streams.py   a stdout, disk or home that is bad
    files.py      malformed files of every kind
    schedules.py  the random plays of tests/oracle.py, by every driver
    kills.py      pipelines and worker pools killed at random moments
"""

"""What all commands share. Skip it: nothing here decides what runs next.

enter, cli   how a command starts and ends; errors in one line; files that are written
flags        each flag's name, range and help
checks       how a bad value is refused
"""

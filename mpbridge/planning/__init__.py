"""What a run needs before it starts: machines, memory, step time and the rules that forbid or warn. Pure answers; loads no framework."""

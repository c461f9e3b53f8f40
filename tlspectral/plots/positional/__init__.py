"""Figures of positional and symbolic scores: tables of `tlspectral.positional` in, matplotlib Figures out.

They follow "Decoupling Positional and Symbolic Attention Behavior" (PS), Figures 1, 3, 5, 6 and 7, in colours that
survive print and colour blindness.
"""

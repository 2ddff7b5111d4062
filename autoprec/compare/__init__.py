"""Runs a user's own training with static settings and with autoprec, side by side, and says what to keep.

Needs the extra ``cli``; ``import autoprec`` does not import it.
"""

"""Ships as ``autoprec.envs``: the knobs of a training run as a reinforcement-learning environment.

Empty in this version: there is no environment yet. Import it as ``autoprec.envs``, never as ``envs``.
"""

"""The main job: the same training with and without autoprec, side by side, on real data (``autoprec demo``).

An *arm* is one way of training. The arm under test is *steered*: the callback moves its formats; the others are static.

Reading order: ``tasks`` (what is compared) -> ``turns`` (how runs take turns) -> ``worker`` (one run) -> ``results``
and ``summary`` (what follows from the numbers) -> ``table``, ``record``, ``picture``. Needs the extra ``cli``.
"""

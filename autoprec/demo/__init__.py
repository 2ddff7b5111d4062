"""The main job: the same training static and steered, side by side, on real data (``autoprec demo``).

Reading order: ``tasks`` (what is compared) -> ``turns`` (how runs take turns) -> ``worker`` (one run) -> ``results``
and ``summary`` (what follows from the numbers) -> ``table``, ``record``, ``picture``. Needs the extra ``cli``.
"""

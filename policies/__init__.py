"""Ships as ``autoprec.policies``: learned policies and their training.

Empty in this version: no policy has been trained yet, decisions come from the rules in ``autoprec.rule``. Import it
as ``autoprec.policies``, never as ``policies``.
"""

"""Commands of the ``autoprec`` program, one module each. They are imported by ``autoprec.cli`` only."""

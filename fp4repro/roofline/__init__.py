"""What a recipe gains on which GPU: a model of GEMMs, quantisation passes and the training step,
fitted on a few published measurements and compared with others."""

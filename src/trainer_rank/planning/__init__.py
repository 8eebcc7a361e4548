"""Will it fit? Plans of a training step for devices that need not be there, from geometry alone."""

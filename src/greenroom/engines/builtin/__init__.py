"""The engines that come with Greenroom, one file for each and for what several share. `registry.py` names them."""

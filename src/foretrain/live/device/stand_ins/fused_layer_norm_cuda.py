"""Apex's extension of norms; scripts import it to see whether it is there, and call `apex.normalization`."""

"""Plans: the visible pairs of a mask in the order a machine wants, by tile and by edge."""

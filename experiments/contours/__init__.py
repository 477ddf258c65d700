"""Does a model follow the contour? What the markers alone tell, and what its attention sees."""

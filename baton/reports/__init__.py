"""What commands print and draw: tables, figures, Pareto fronts."""

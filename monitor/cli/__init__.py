"""The commands `keepstep monitor`, `top` and `doctor`."""

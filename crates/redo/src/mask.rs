//! Masks.

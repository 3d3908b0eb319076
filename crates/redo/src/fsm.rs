//! The free space map.

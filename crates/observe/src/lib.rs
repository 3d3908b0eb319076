//! What a running Walrider tells about itself: a snapshot of its status, as JSON, as metrics for Prometheus, as a verdict
//! for load balancers, and over HTTP.
//!
//! This crate never changes what it looks at, and knows neither sockets of the replication protocol nor files, but for what
//! `/proc` says of its own process.

pub mod health;
pub mod http;
pub mod metrics;
mod process;
pub mod status;

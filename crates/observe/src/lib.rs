//! What a running Walrider tells about itself: a snapshot of its status, as JSON, as metrics for Prometheus, as a verdict
//! for load balancers, and over HTTP.
//!
//! This crate never changes what it looks at, and knows neither sockets of the replication protocol nor files, but for what
//! `/proc` says of its own process. [`client`] asks another one.

pub mod apply;
pub mod client;
pub mod health;
pub mod http;
pub mod metrics;
mod process;
pub mod status;

/// A snapshot of what is observed.
pub trait Observed: Send + 'static {
    /// The JSON of `/status`.
    fn to_json(&self) -> serde_json::Value;
    /// The text of `/metrics`.
    fn metrics(&self) -> String;
    /// The verdict of `/health`, or the reason why not.
    fn health(&self, limits: &health::Limits) -> Result<(), String>;
    /// Whether it has begun with its work.
    fn is_ready(&self) -> bool;
    /// A few words, for `systemctl status`.
    fn summary(&self) -> String;
}

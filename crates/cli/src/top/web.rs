//! The same view as a web page, which asks for it again and again.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use walrider_lag::sample::SCHEMA_VERSION;
use walrider_lag::split::View;
use walrider_observe::http::{self, Answer, Handle, HttpError};

use super::metrics;
use super::trend::Trend;

/// Connections at a time; the page opens one for each round.
const CONNECTIONS: usize = 16;
/// The page has all that it needs: nothing is loaded, but from this port.
const POLICY: &str = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const PAGE: &str = include_str!("page.html");
/// What all pages have in common.
const STYLE: &str = include_str!("../style.css");

/// What is served beside the page.
struct Pages {
    view: String,
    metrics: String,
}

/// Serves until it is dropped.
pub struct Web {
    latest: Arc<Mutex<Pages>>,
    handle: Handle,
}

impl Web {
    /// Listens at HOST:PORT.
    pub fn start(address: &str) -> Result<Web, HttpError> {
        let latest = Arc::new(Mutex::new(Pages { view: object(&Value::Null, None), metrics: String::new() }));
        let shared = latest.clone();
        let served = move |page: fn(&Pages) -> &String| page(&shared.lock().expect("no panic while locked")).clone();
        let pages = move |path: &str, _: Option<&str>| match path {
            "/" => Answer::html(POLICY, PAGE.replace("/* STYLE */", STYLE)),
            "/view.json" => Answer::ok("application/json", served(|pages| &pages.view)),
            "/metrics" => Answer::metrics(served(|pages| &pages.metrics)),
            _ => Answer::not_found("there is /, /view.json and /metrics"),
        };
        Ok(Web { latest, handle: http::serve_pages(address, Arc::new(pages), CONNECTIONS)? })
    }

    /// Where the page is.
    pub fn url(&self) -> String {
        format!("http://{}/", self.handle.address())
    }

    /// From now on this is what the page shows.
    pub fn show(&self, view: &View, trend: &Trend, time: f64, interval: Duration) {
        let view_json = object(&json!(view), Some((trend, time, interval)));
        *self.latest.lock().expect("no panic while locked") = Pages { view: view_json, metrics: metrics::render(view) };
    }
}

fn object(view: &Value, rest: Option<(&Trend, f64, Duration)>) -> String {
    let (trend, time, interval) = match rest {
        Some((trend, time, interval)) => (json!(trend), json!(time), json!(interval.as_secs_f64())),
        None => (Value::Null, Value::Null, Value::Null),
    };
    let object = json!({
        "schema_version": SCHEMA_VERSION, "time": time, "interval_seconds": interval, "view": view, "trend": trend,
    });
    format!("{object}\n")
}

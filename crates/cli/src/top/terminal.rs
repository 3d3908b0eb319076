//! The terminal that a [`Screen`] is drawn on: keys, size, and that it is left as it was found.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use walrider_lag::split::View;

use super::Stop;
use super::screen::{Screen, Shown, Wish};
use super::trend::Trend;

/// How often to look whether a signal has come.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Raw, on its alternate screen, until it is dropped. A panic restores it as well, before it is printed (`ratatui::try_init`).
pub struct Terminal {
    terminal: DefaultTerminal,
    screen: Screen,
    /// What is displayed: the newest, unless the display is held.
    shown: (View, Trend, String),
    interval: Duration,
}

/// What a wait ended with.
enum Found {
    Nothing,
    Event,
    /// The terminal is gone.
    Gone,
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // It also writes what a failure would be written to.
        ratatui::restore();
    }
}

impl Terminal {
    /// Whether there is one.
    pub fn is_there() -> bool {
        io::stdout().is_terminal()
    }

    /// Takes it.
    ///
    /// # Errors
    /// If it cannot be set to pass every key on.
    pub fn take(interval: Duration) -> io::Result<Terminal> {
        let terminal = ratatui::try_init()?;
        // https://no-color.org
        let colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let screen = Screen::new(colours);
        Ok(Terminal { terminal, screen, shown: (View::default(), Trend::default(), String::new()), interval })
    }

    /// Displays a view, unless the display is held, and does what keys say until `deadline`; false once the user wants to quit.
    ///
    /// # Errors
    /// If the terminal is gone.
    pub fn show(&mut self, view: &View, trend: &Trend, deadline: Instant, stop: &Stop) -> io::Result<bool> {
        if !self.screen.held {
            let time = jiff::Timestamp::now().strftime("%H:%M:%S UTC").to_string();
            self.shown = (view.clone(), trend.clone(), time);
        }
        self.draw()?;
        while !stop.is_wanted() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(true);
            }
            match self.wait(left.min(LOOK_INTERVAL))? {
                Found::Gone => return Ok(false),
                Found::Nothing => continue,
                Found::Event => {}
            }
            let wish = match event::read()? {
                Event::Key(key) => self.screen.key(key, &self.shown.0),
                Event::Resize(..) => Wish::Draw,
                _ => Wish::Nothing,
            };
            match wish {
                Wish::Quit => return Ok(false),
                Wish::Draw => self.draw()?,
                Wish::Nothing => {}
            }
        }
        Ok(false)
    }

    /// Waits for a key. crossterm reads on and on from a terminal that is gone (0.29), so it must not be the one that waits.
    fn wait(&self, time: Duration) -> io::Result<Found> {
        let stdin = io::stdin();
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        match poll(&mut fds, Some(&time.try_into().unwrap_or_default())) {
            // A signal: perhaps the size has changed.
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
            return Ok(Found::Gone);
        }
        Ok(if event::poll(Duration::ZERO)? { Found::Event } else { Found::Nothing })
    }

    fn draw(&mut self) -> io::Result<()> {
        let (view, trend, time) = &self.shown;
        let shown = Shown { view, trend, time, interval: self.interval };
        self.terminal.draw(|frame| self.screen.draw(frame, &shown)).map(drop)
    }
}

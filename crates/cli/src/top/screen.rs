//! A view as a full screen: what is drawn, and what keys do. No terminal, no clock.

use std::time::Duration;

use ratatui::Frame;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Clear, Paragraph, Row, Sparkline, SparklineBar, Table, TableState, Wrap};
use walrider_lag::split::{Part, Stage, Standby, View};
use walrider_lag::words::bytes;

use super::text::{self, duration};
use super::trend::{self, Trend};

/// Width of words before a sparkline or a bar.
const LABEL: u16 = 24;

/// The widest column of a table; longer names are cut.
const MAX_COLUMN: usize = 30;

const HELP: &str = "\
q, Ctrl-C   quit
p, space    hold the display; what is asked, recorded and served goes on
j, k, arrows  choose the standby whose lag is taken apart below
?           this

sent, write, flush, replay: bytes behind the primary's flush.
lag: how long ago the primary had flushed what is replayed now.
replays: WAL replayed; could: what it would replay if it did nothing
else; above that, it falls behind.
The lag's parts are in the order of their size.";

/// What is drawn.
pub struct Shown<'a> {
    /// The newest.
    pub view: &'a View,
    /// And before.
    pub trend: &'a Trend,
    /// The time, as text.
    pub time: &'a str,
    /// How often there is a new one.
    pub interval: Duration,
}

/// What the user chose.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Screen {
    /// The chosen standby, by [`Standby::key`]; the first, if there is no such one.
    selected: Option<String>,
    /// The display stands still.
    pub held: bool,
    help: bool,
    colours: bool,
}

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// The end.
    Quit,
    /// To draw again.
    Draw,
    /// Nothing.
    Nothing,
}

impl Screen {
    /// At first, with colours or without.
    pub fn new(colours: bool) -> Screen {
        Screen { colours, ..Screen::default() }
    }

    /// A key was pressed.
    pub fn key(&mut self, key: KeyEvent, view: &View) -> Wish {
        if key.kind == KeyEventKind::Release {
            return Wish::Nothing;
        }
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Wish::Quit,
            KeyCode::Esc if self.help => self.help = false,
            KeyCode::Char('q') | KeyCode::Esc => return Wish::Quit,
            KeyCode::Char('p' | ' ') => self.held = !self.held,
            KeyCode::Char('?' | 'h') => self.help = !self.help,
            KeyCode::Char('j') | KeyCode::Down => self.choose(view, 1),
            KeyCode::Char('k') | KeyCode::Up => self.choose(view, -1),
            _ => return Wish::Nothing,
        }
        Wish::Draw
    }

    fn chosen(&self, view: &View) -> usize {
        let named = |standby: &Standby| self.selected.as_ref() == Some(&standby.key());
        view.standbys.iter().position(named).unwrap_or(0)
    }

    fn choose(&mut self, view: &View, step: isize) {
        let next = self.chosen(view).saturating_add_signed(step).min(view.standbys.len().saturating_sub(1));
        self.selected = view.standbys.get(next).map(Standby::key);
    }

    fn colour(&self, colour: Color) -> Style {
        if self.colours { Style::new().fg(colour) } else { Style::new() }
    }

    /// Draws all of it. Where there is little room, what is less important gets none.
    pub fn draw(&self, frame: &mut Frame<'_>, shown: &Shown<'_>) {
        let view = shown.view;
        let area = frame.area();
        let chosen = view.standbys.get(self.chosen(view));
        let mut left = area.height;
        let mut take = |wanted: usize| {
            let given = u16::try_from(wanted).unwrap_or(u16::MAX).min(left);
            left -= given;
            given
        };
        // In the order of importance; they stand in another.
        let footer = take(1);
        let head = take(2 + if view.error.is_some() { 2 } else { 0 });
        let table = take((1 + view.standbys.len()).clamp(2, usize::from(area.height / 3).max(2)));
        let detail = take(chosen.map_or(0, |standby| 8 + standby.parts.len().max(4)));
        let slots = take(if view.slots.is_empty() { 0 } else { 2 + view.slots.len().min(8) });
        let content = text::content(view);
        let wal = take(2 + 2 * content.len());
        let notes = take(usize::from(area.height));
        let heights = [head, wal, table, detail, slots, notes, footer].map(Constraint::Length);
        let [head, wal, table, detail, slots, notes, footer] = Layout::vertical(heights).areas(area);
        self.head(frame, head, shown);
        let rate = |rate: f64| format!("{}/s", bytes(rate));
        let [wal, below] = Layout::vertical([Constraint::Length(2), Constraint::Fill(1)]).areas(wal);
        let lines: Vec<Line<'_>> = content.into_iter().map(Line::raw).collect();
        frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: true }), below);
        self.sparkline(frame, wal, "WAL", &shown.trend.wal_rate, Color::Blue, rate);
        self.table(frame, table, view);
        if let Some(standby) = chosen {
            self.detail(frame, detail, standby, shown.trend);
        }
        self.slots(frame, slots, view);
        frame.render_widget(Paragraph::new(notes_of(view)).wrap(Wrap { trim: false }), notes);
        let keys =
            if self.held { " HELD: p goes on   q quit   ? help" } else { " q quit   p hold   j/k standby   ? help" };
        frame.render_widget(Paragraph::new(keys).style(Style::new().add_modifier(Modifier::REVERSED)), footer);
        if self.help {
            help(frame, area);
        }
    }

    fn head(&self, frame: &mut Frame<'_>, area: Rect, shown: &Shown<'_>) {
        let view = shown.view;
        let primary = if view.primary.is_empty() { "no primary" } else { &view.primary };
        let bold = Style::new().add_modifier(Modifier::BOLD);
        // Names may be long, and are cut.
        let title = format!("walrider top  {}  every {}  ", shown.time, duration(shown.interval.as_secs_f64()));
        let lines = vec![Line::from(vec![Span::raw(title), Span::styled(primary, bold)]), Line::raw(text::rates(view))];
        let [top, below] = Layout::vertical([Constraint::Length(2), Constraint::Fill(1)]).areas(area);
        frame.render_widget(Paragraph::new(lines), top);
        if let Some(error) = &view.error {
            let error = Paragraph::new(error.as_str()).style(self.colour(Color::Red).add_modifier(Modifier::BOLD));
            frame.render_widget(error.wrap(Wrap { trim: false }), below);
        }
    }

    /// A number as it went: its name, what it is and was at most, and the line.
    fn sparkline(
        &self,
        frame: &mut Frame<'_>,
        area: Rect,
        name: &str,
        line: &trend::Line,
        colour: Color,
        show: impl Fn(f64) -> String,
    ) {
        let [label, graph] = Layout::horizontal([Constraint::Length(LABEL), Constraint::Fill(1)]).areas(area);
        let seen: Vec<Option<f64>> = line.iter().rev().take(usize::from(graph.width)).rev().copied().collect();
        let most = seen.iter().flatten().fold(0.0_f64, |most, value| most.max(*value));
        let now = seen.last().copied().flatten().map_or("?".to_owned(), &show);
        let words = if area.height > 1 {
            vec![Line::raw(format!("{name} {now}")), Line::raw(format!("  at most {}", show(most)))]
        } else {
            vec![Line::raw(format!("{name} {now}"))]
        };
        frame.render_widget(Paragraph::new(words), label);
        // Eighths of a line are all that can be told apart.
        let bars = seen.into_iter().map(|value| {
            SparklineBar::from(value.map(|value| if most > 0.0 { (value / most * 1000.0).round() as u64 } else { 0 }))
        });
        let spark = Sparkline::default().data(bars).max(1000).absent_value_symbol("·").style(self.colour(colour));
        frame.render_widget(spark, graph);
    }

    fn table(&self, frame: &mut Frame<'_>, area: Rect, view: &View) {
        let cells: Vec<[String; 11]> = view.standbys.iter().map(text::row).collect();
        let width = |nth: usize| {
            cells.iter().map(|row| row[nth].chars().count()).chain([text::COLUMNS[nth].len()]).max().unwrap_or(0)
        };
        let widths: Vec<Constraint> =
            (0..text::COLUMNS.len()).map(|nth| Constraint::Length(width(nth).min(MAX_COLUMN) as u16)).collect();
        let rows = view.standbys.iter().zip(cells).map(|(standby, cells)| {
            let style = match () {
                () if !standby.connected || standby.error.is_some() => {
                    self.colour(Color::Red).add_modifier(Modifier::BOLD)
                }
                () if standby.state != "streaming" => self.colour(Color::Yellow),
                () => Style::new(),
            };
            Row::new(cells).style(style)
        });
        let header = Row::new(text::COLUMNS).style(Style::new().add_modifier(Modifier::UNDERLINED));
        let table = Table::new(rows, widths)
            .header(header)
            .column_spacing(1)
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
        // One is no choice.
        let chosen = (view.standbys.len() > 1).then(|| self.chosen(view));
        frame.render_stateful_widget(table, area, &mut TableState::new().with_selected(chosen));
        if view.standbys.is_empty() && area.height > 1 {
            let below = Rect { y: area.y + 1, height: area.height - 1, ..area };
            frame.render_widget(Paragraph::new("no standby is connected, and none was named"), below);
        }
    }

    /// One standby: what its lag is made of, its stages, its speed.
    fn detail(&self, frame: &mut Frame<'_>, area: Rect, standby: &Standby, trend: &Trend) {
        let title = match &standby.error {
            Some(error) => format!("─ {}: {error} ", standby.name),
            None if !standby.connected => {
                format!("─ {}: {}; lag {} ", standby.name, standby.state, text::lag(&standby.replay))
            }
            None => format!("─ {}: lag {} ", standby.name, text::lag(&standby.replay)),
        };
        let heights = [1, 1, u16::try_from(standby.parts.len().max(4)).unwrap_or(14), 2, 1, 1].map(Constraint::Length);
        let [rule, stack, body, speed, lag, replay] = Layout::vertical(heights).areas(area);
        frame.render_widget(Paragraph::new(format!("{title:─<width$}", width = usize::from(area.width))), rule);
        let all: f64 = standby.parts.iter().map(|(_, seconds)| seconds).sum();
        frame.render_widget(Paragraph::new(self.stacked(standby, all, usize::from(stack.width))), stack);
        let [parts, stages] = Layout::horizontal([Constraint::Fill(1), Constraint::Length(36)]).areas(body);
        let lines: Vec<Line<'_>> = if standby.parts.is_empty() {
            vec![Line::raw(match standby.replay.seconds {
                Some(0.0) => "no lag",
                Some(_) => "what it is made of is not known",
                None => "its lag is not known",
            })]
        } else {
            standby.parts.iter().enumerate().map(|(nth, part)| self.part(nth, part, all, parts.width)).collect()
        };
        frame.render_widget(Paragraph::new(lines), parts);
        let stage = |name: &str, stage: &Stage| {
            let behind = stage.bytes.map_or("?".to_owned(), |behind| bytes(behind as f64));
            let lsn = stage.lsn.map_or("?".to_owned(), |lsn| lsn.to_string());
            Line::raw(format!("{name:<7}{lsn:<14}{behind:>7} {:>7}", text::lag(stage)))
        };
        let lines = vec![
            stage("sent", &standby.sent),
            stage("write", &standby.write),
            stage("flush", &standby.flush),
            stage("replay", &standby.replay),
        ];
        frame.render_widget(Paragraph::new(lines), stages);
        frame.render_widget(Paragraph::new(text::speed(standby)).wrap(Wrap { trim: true }), speed);
        let none = trend::StandbyTrend::default();
        let before = trend.standbys.get(&standby.key()).unwrap_or(&none);
        self.sparkline(frame, lag, "lag", &before.lag_seconds, Color::Red, duration);
        let rate = |rate: f64| format!("{}/s", bytes(rate));
        self.sparkline(frame, replay, "replays", &before.replay_rate, Color::Green, rate);
    }

    /// The parts side by side, each as long as its share.
    fn stacked(&self, standby: &Standby, all: f64, width: usize) -> Line<'static> {
        let (mut spans, mut sum, mut drawn) = (Vec::new(), 0.0, 0);
        for (nth, (part, seconds)) in standby.parts.iter().enumerate() {
            sum += seconds;
            let until = ((sum / all * width as f64).round() as usize).min(width);
            spans.push(Span::styled(self.fill(nth).repeat(until - drawn), self.colour(colour_of(*part))));
            drawn = until;
        }
        Line::from(spans)
    }

    fn part(&self, nth: usize, (part, seconds): &(Part, f64), all: f64, width: u16) -> Line<'static> {
        let share = seconds / all;
        let room = usize::from(width.saturating_sub(LABEL + 8));
        let bar = self.fill(nth).repeat((share * room as f64).round() as usize);
        Line::from(vec![
            Span::raw(format!("{:<13}{:>10} {:>3.0} % ", part.name(), duration(*seconds), share * 100.0)),
            Span::styled(bar, self.colour(colour_of(*part))),
        ])
    }

    /// Parts are told apart by colour, and where there is none, by this.
    fn fill(&self, nth: usize) -> &'static str {
        if self.colours { "█" } else { ["█", "▒", "▓", "░"][nth % 4] }
    }

    fn slots(&self, frame: &mut Frame<'_>, area: Rect, view: &View) {
        let rows = view.slots.iter().map(|slot| {
            let status = slot.wal_status.clone().unwrap_or_default();
            let style = match status.as_str() {
                "lost" => self.colour(Color::Red).add_modifier(Modifier::BOLD),
                "unreserved" => self.colour(Color::Yellow).add_modifier(Modifier::BOLD),
                _ => Style::new(),
            };
            Row::new(text::slot(slot)).style(style)
        });
        let widths = [Constraint::Fill(2), Constraint::Length(9), Constraint::Fill(2)].into_iter().chain([
            Constraint::Length(9),
            Constraint::Length(11),
            Constraint::Length(14),
        ]);
        let header = Row::new(text::SLOT_COLUMNS).style(Style::new().add_modifier(Modifier::UNDERLINED));
        let table = Table::new(rows, widths)
            .header(header)
            .column_spacing(1)
            .block(Block::new().borders(Borders::TOP).title_top("─ slots "));
        frame.render_widget(table, area);
    }
}

fn notes_of(view: &View) -> Vec<Line<'_>> {
    view.notes.iter().map(|note| Line::raw(format!("note: {note}"))).collect()
}

fn help(frame: &mut Frame<'_>, area: Rect) {
    let (wide, high) = (74.min(area.width), 14.min(area.height));
    let middle =
        Rect { x: area.x + (area.width - wide) / 2, y: area.y + (area.height - high) / 2, width: wide, height: high };
    frame.render_widget(Clear, middle);
    frame.render_widget(Paragraph::new(HELP).block(Block::bordered().title_top(" walrider top ")), middle);
}

fn colour_of(part: Part) -> Color {
    match part {
        Part::NotSent => Color::Blue,
        Part::Network => Color::Magenta,
        Part::StandbyWrite => Color::LightMagenta,
        Part::StandbyFsync => Color::Yellow,
        Part::Replay | Part::ReplayCpu => Color::Green,
        Part::ReplayRead => Color::Cyan,
        Part::ReplayWrite => Color::LightCyan,
        Part::WalFetch => Color::LightBlue,
        Part::NotConnected | Part::Conflict => Color::Red,
        Part::ApplyDelay => Color::Gray,
        Part::Paused => Color::DarkGray,
        Part::Stopped => Color::LightRed,
        Part::ReplayOther => Color::LightGreen,
    }
}

#[cfg(test)]
#[path = "screen/tests.rs"]
mod tests;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use walrider_lag::slots::SlotView;
use walrider_lag::split::Speed;
use walrider_layout::Lsn;

use super::*;

fn stage(bytes: u64, seconds: f64) -> Stage {
    Stage { lsn: Some(Lsn(0x300_0000 - bytes)), bytes: Some(bytes), seconds: Some(seconds), at_least: false }
}

fn standby(name: &str) -> Standby {
    Standby {
        name: name.into(),
        connected: true,
        asked: true,
        state: "streaming".into(),
        sync_state: Some("async".into()),
        sent: stage(0, 0.0),
        write: stage(1000, 0.1),
        flush: stage(20_000, 0.5),
        replay: stage(200_000, 2.0),
        parts: vec![(Part::Conflict, 1.5), (Part::StandbyFsync, 0.4), (Part::Network, 0.1)],
        speed: Speed {
            rate: Some(2e6),
            utilisation: Some(0.125),
            capacity: Some(16.0 * 1024.0 * 1024.0),
            catch_up: Some(3.0),
            cpu: Some(0.1),
        },
        ..Standby::default()
    }
}

fn view(standbys: Vec<Standby>) -> View {
    let slot = SlotView { name: "s1".into(), kind: "physical".into(), held: Some(200_000), ..SlotView::default() };
    View {
        primary: "127.0.0.1:5432".into(),
        wal_rate: Some(1.5e6),
        standbys,
        slots: vec![slot],
        notes: vec!["b: not asked".into()],
        ..View::default()
    }
}

fn drawn(screen: &Screen, view: &View, (width, height): (u16, u16)) -> Buffer {
    let mut trend = Trend::default();
    for rate in [0.0, 1e6, 2e6] {
        trend.note(&View { wal_rate: Some(rate), ..view.clone() });
    }
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let shown = Shown { view, trend: &trend, time: "12:00:00 UTC", interval: Duration::from_secs(1) };
    terminal.draw(|frame| screen.draw(frame, &shown)).unwrap();
    terminal.backend().buffer().clone()
}

fn lines(buffer: &Buffer) -> Vec<String> {
    let width = usize::from(buffer.area.width);
    let line = |cells: &[ratatui::buffer::Cell]| cells.iter().map(ratatui::buffer::Cell::symbol).collect::<String>();
    buffer.content.chunks(width).map(|cells| line(cells).trim_end().to_owned()).collect()
}

fn text_of(screen: &Screen, view: &View, size: (u16, u16)) -> String {
    lines(&drawn(screen, view, size)).join("\n")
}

fn press(screen: &mut Screen, code: KeyCode, view: &View) -> Wish {
    screen.key(KeyEvent::new(code, KeyModifiers::NONE), view)
}

#[test]
fn everything_is_on_a_screen_of_80_by_24() {
    let text = text_of(&Screen::default(), &view(vec![standby("walrider")]), (80, 24));
    for word in [
        "walrider top  12:00:00 UTC  every 1.0 s  127.0.0.1:5432",
        "WAL 1465 kB/s",
        "at most 1953 kB/s",
        "caught up in",
        "─ walrider: lag 2.0 s",
        "conflict          1.5 s  75 %",
        "fsync            400 ms  20 %",
        "replay 0/2FCF2C0      195 kB   2.0 s",
        "replays 1953 kB/s, busy 12 % of the time, 10 % of a core; falls behind above",
        "slots",
        "195 kB",
        "q quit",
    ] {
        assert!(text.contains(word), "{word}\n{text}");
    }
}

#[test]
fn disconnected_is_never_lag_0() {
    let gone = Standby { state: "not connected".into(), ..Standby { name: "s".into(), ..Standby::default() } };
    let text = text_of(&Screen::default(), &view(vec![gone]), (80, 24));
    assert!(text.contains("─ s: not connected; lag ?") && text.contains("its lag is not known"), "{text}");
    assert!(!text.contains("no lag"), "{text}");
}

#[test]
fn without_colours_there_are_none_and_parts_differ() {
    let view = view(vec![standby("s")]);
    let plain = drawn(&Screen::default(), &view, (80, 24));
    assert!(plain.content.iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset));
    let text = lines(&plain).join("\n");
    assert!(text.contains("██▒▒") && text.contains("▒▓"), "{text}");
    let coloured = drawn(&Screen { colours: true, ..Screen::default() }, &view, (80, 24));
    assert!(coloured.content.iter().any(|cell| cell.fg == Color::Red));
}

#[test]
fn keys() {
    let view = view(vec![standby("a"), standby("b")]);
    let mut screen = Screen::default();
    assert!(text_of(&screen, &view, (100, 30)).contains("─ a: lag"));
    for (code, shown) in [
        (KeyCode::Char('j'), "─ b: lag"),
        (KeyCode::Down, "─ b: lag"),
        (KeyCode::Up, "─ a: lag"),
        (KeyCode::Up, "─ a: lag"),
        (KeyCode::Char('p'), "HELD: p goes on"),
        (KeyCode::Char('?'), "how long ago the primary had flushed"),
    ] {
        assert_eq!(press(&mut screen, code, &view), Wish::Draw);
        let text = text_of(&screen, &view, (100, 30));
        assert!(text.contains(shown), "{code:?}\n{text}");
    }
    assert_eq!(press(&mut screen, KeyCode::Esc, &view), Wish::Draw);
    assert_eq!(press(&mut screen, KeyCode::Char('x'), &view), Wish::Nothing);
    assert_eq!(press(&mut screen, KeyCode::Char('q'), &view), Wish::Quit);
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(screen.key(interrupt, &view), Wish::Quit);
    // Nobody to choose.
    assert_eq!(press(&mut screen, KeyCode::Down, &View::default()), Wish::Draw);
}

/// The one that was chosen stays so when another comes before it.
#[test]
fn the_choice_is_of_a_standby_not_of_a_line() {
    let mut screen = Screen::default();
    press(&mut screen, KeyCode::Down, &view(vec![standby("b"), standby("c")]));
    let text = text_of(&screen, &view(vec![standby("a"), standby("b"), standby("c")]), (100, 30));
    assert!(text.contains("─ c: lag"), "{text}");
}

/// Any size, any number of standbys, and names that would move the cursor.
#[test]
fn any_size() {
    let hostile = Standby { name: "\x1b[2J\u{202e}é\n".into(), parts: vec![(Part::Replay, 1e-300)], ..standby("x") };
    let many: Vec<Standby> = (0..50).map(|nth| standby(&format!("s{nth}"))).chain([hostile]).collect();
    let screen = Screen { help: true, colours: true, ..Screen::default() };
    for standbys in [many, vec![standby("one")], Vec::new()] {
        let view = View { error: Some("gone".into()), ..view(standbys) };
        for width in [1, 2, 20, 79, 300] {
            for height in [1, 2, 5, 10, 23, 100] {
                let buffer = drawn(&screen, &view, (width, height));
                assert!(!buffer.content.iter().any(|cell| cell.symbol().contains(char::is_control)));
                drawn(&Screen::default(), &view, (width, height));
            }
        }
    }
}

//! Ranks find each other over real sockets, as threads and as processes, among strangers.
//!
//! With `RANK` set this program is one rank of a job, as torchrun would start it; else it runs the tests.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Trial};
use lrmoe_comm::{Error, rendezvous::share};

/// Long enough that a test which waits for it would be seen to hang.
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(400);
const HOST: &str = "127.0.0.1";

fn main() {
    if let Ok(rank) = std::env::var("RANK") {
        return be_a_rank(rank.parse().unwrap());
    }
    let tests: [(&str, fn()); 11] = [
        ("everyone_gets_the_bytes", everyone_gets_the_bytes),
        ("rank_0_may_come_last", rank_0_may_come_last),
        ("a_missing_rank_is_named", a_missing_rank_is_named),
        ("a_missing_rank_0_is_named", a_missing_rank_0_is_named),
        (
            "the_wrong_ranks_are_turned_away",
            the_wrong_ranks_are_turned_away,
        ),
        ("strangers_are_turned_away", strangers_are_turned_away),
        ("a_rank_may_come_again", a_rank_may_come_again),
        (
            "a_stranger_in_place_of_rank_0",
            a_stranger_in_place_of_rank_0,
        ),
        ("misuse", misuse),
        ("processes", processes),
        ("a_killed_process_is_named", a_killed_process_is_named),
    ];
    let trial = |(name, test): (&str, fn())| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    let trials = tests.into_iter().map(trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    listener.local_addr().unwrap().port()
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 % 256) as u8).collect()
}

/// What each of these ranks gets, each in a thread of its own.
fn come(
    who: &[(usize, usize)],
    port: u16,
    deadline: Duration,
    len: usize,
) -> Vec<Result<Vec<u8>, Error>> {
    thread::scope(|scope| {
        let come = |&(rank, ranks): &(usize, usize)| {
            let given = if rank == 0 { bytes(len) } else { vec![1; 3] };
            scope.spawn(move || share((rank, ranks), (HOST, port), deadline, &given))
        };
        let ranks: Vec<_> = who.iter().map(come).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn world(ranks: usize) -> Vec<(usize, usize)> {
    (0..ranks).map(|rank| (rank, ranks)).collect()
}

fn everyone_gets_the_bytes() {
    for (ranks, len) in [(1, 5), (2, 0), (2, 128), (3, 1), (5, 65_536), (8, 128)] {
        for result in come(&world(ranks), free_port(), LONG, len) {
            assert_eq!(result, Ok(bytes(len)));
        }
    }
}

fn rank_0_may_come_last() {
    let port = free_port();
    thread::scope(|scope| {
        let guest = scope.spawn(move || share((1, 2), ("localhost", port), LONG, &[]));
        thread::sleep(SHORT);
        assert_eq!(share((0, 2), (HOST, port), LONG, &bytes(9)), Ok(bytes(9)));
        assert_eq!(guest.join().unwrap(), Ok(bytes(9)));
    });
}

fn a_missing_rank_is_named() {
    let start = Instant::now();
    // The guests have more patience than rank 0, whose deadline counts once they have come.
    let results = thread::scope(|scope| {
        let port = free_port();
        let host = scope.spawn(move || share((0, 5), (HOST, port), SHORT, &[]));
        let mut results = come(&[(1, 5), (4, 5)], port, LONG, 0);
        results.push(host.join().unwrap());
        results
    });
    for result in results {
        let Err(Error::Absent {
            rank: 2, waited, ..
        }) = result
        else {
            panic!("{result:?}");
        };
        // The guests are told milliseconds.
        assert!(waited + Duration::from_millis(1) > SHORT);
    }
    assert!(start.elapsed() < LONG / 2);
}

fn a_missing_rank_0_is_named() {
    for result in come(&[(1, 3), (2, 3)], free_port(), SHORT, 0) {
        assert!(
            matches!(result, Err(Error::Absent { rank: 0, .. })),
            "{result:?}"
        );
    }
}

/// Ranks that do not belong are told so at once, and the others wait on for those that do.
fn the_wrong_ranks_are_turned_away() {
    let port = free_port();
    thread::scope(|scope| {
        let early = scope.spawn(move || come(&[(0, 4), (1, 4), (2, 4)], port, LONG, 8));
        thread::sleep(SHORT);
        let come = |rank, ranks| share((rank, ranks), (HOST, port), LONG, &[]);
        let (rank, found, expected) = (3, 5, 4);
        let size = Error::WorldSize {
            rank,
            found,
            expected,
        };
        assert_eq!(size.to_string(), "rank 3 expects 5 ranks, rank 0 expects 4");
        assert_eq!(come(3, 5), Err(size));
        assert_eq!(come(2, 4), Err(Error::RankTaken { rank: 2 }));
        assert_eq!(come(3, 4), Ok(bytes(8)));
        assert_eq!(early.join().unwrap(), vec![Ok(bytes(8)); 3]);
    });
}

fn strangers_are_turned_away() {
    let port = free_port();
    thread::scope(|scope| {
        let early = scope.spawn(move || come(&[(0, 3), (1, 3)], port, LONG, 128));
        let connect = || loop {
            if let Ok(stream) = TcpStream::connect((HOST, port)) {
                break stream;
            }
            thread::sleep(Duration::from_millis(5));
        };
        // Silent, half a greeting, gone at once: they stay connected until the end where they can.
        let _silent = connect();
        let mut half = connect();
        half.write_all(b"lrmoe\0").unwrap();
        drop(connect());
        let mut web = connect();
        web.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        web.set_read_timeout(Some(LONG)).unwrap();
        let answer = web.read(&mut [0; 64]);
        assert!(
            !matches!(answer, Ok(1..)),
            "a stranger is told nothing: {answer:?}"
        );
        assert_eq!(share((2, 3), (HOST, port), LONG, &[]), Ok(bytes(128)));
        assert_eq!(early.join().unwrap(), [Ok(bytes(128)), Ok(bytes(128))]);
    });
}

fn a_rank_may_come_again() {
    let port = free_port();
    thread::scope(|scope| {
        let host = scope.spawn(move || share((0, 3), (HOST, port), LONG, &bytes(4)));
        let mut hello = b"lrmoe\0\x01\n".to_vec();
        hello.extend([1u32, 3].map(u32::to_le_bytes).concat());
        loop {
            if let Ok(mut first) = TcpStream::connect((HOST, port)) {
                first.write_all(&hello).unwrap();
                thread::sleep(Duration::from_millis(50));
                break;
            }
        }
        for result in come(&[(2, 3), (1, 3)], port, LONG, 0) {
            assert_eq!(result, Ok(bytes(4)));
        }
        assert_eq!(host.join().unwrap(), Ok(bytes(4)));
    });
}

/// It answers something else, hangs up, says nothing, or stops in the middle.
fn a_stranger_in_place_of_rank_0() {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let ask = |deadline| share((1, 2), (HOST, port), deadline, &[]);
    let answers: [(&[u8], bool); 5] = [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", true),
        (b"l?", true),
        (b"", false),
        (b"lrmoe\0\x01\n\0\0", false),
        (b"lrmoe\0\x01\n\xff\0\0\0\0\0\0\0\0\0\0\0", true),
    ];
    for (answer, is_stranger) in answers {
        for hangs_up in [false, true] {
            let result = thread::scope(|scope| {
                let asked = scope.spawn(move || ask(SHORT));
                let mut open = vec![];
                listener.set_nonblocking(true).unwrap();
                while !asked.is_finished() {
                    if let Ok((mut stream, _)) = listener.accept() {
                        let _ = stream.read(&mut [0; 64]);
                        let _ = stream.write_all(answer);
                        open.extend((!hangs_up).then_some(stream));
                    }
                    thread::sleep(Duration::from_millis(1));
                }
                asked.join().unwrap()
            });
            match result {
                Err(Error::Stranger { .. }) => assert!(is_stranger, "{answer:?}"),
                Err(Error::Absent { rank: 0, .. }) => assert!(!is_stranger, "{answer:?}"),
                other => panic!("{other:?}"),
            }
        }
    }
}

fn misuse() {
    let (rank, ranks) = (2, 2);
    let refused = share((rank, ranks), (HOST, 1), SHORT, &[]);
    assert_eq!(refused, Err(Error::NoSuchRank { rank, ranks }));

    let (len, most) = (65_537, 65_536);
    let refused = share((0, 2), (HOST, free_port()), SHORT, &bytes(len));
    assert_eq!(refused, Err(Error::TooLong { len, most }));

    let taken = TcpListener::bind((HOST, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = share((0, 2), (HOST, port), SHORT, &[]).unwrap_err();
    let reason = std::io::ErrorKind::AddrInUse;
    let address = format!("{HOST}:{port}");
    assert_eq!(error, Error::Address { address, reason });
}

/// What a rank of `processes` does.
fn be_a_rank(rank: usize) {
    let variable = |name| std::env::var(name).unwrap();
    let ranks = variable("WORLD_SIZE").parse().unwrap();
    let port = variable("MASTER_PORT").parse().unwrap();
    let host = variable("MASTER_ADDR");
    let deadline = Duration::from_millis(variable("DEADLINE_MS").parse().unwrap());
    match share((rank, ranks), (&host, port), deadline, &bytes(128)[rank..]) {
        Ok(bytes) => print!("{bytes:?}"),
        Err(error) => print!("{error}"),
    }
}

fn start_process(rank: usize, ranks: usize, port: u16, deadline: Duration) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .envs([("RANK", rank), ("WORLD_SIZE", ranks)].map(|(name, n)| (name, n.to_string())))
        .env("MASTER_ADDR", HOST)
        .env("MASTER_PORT", port.to_string())
        .env("DEADLINE_MS", deadline.as_millis().to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn processes() {
    let port = free_port();
    let ranks: Vec<_> = (0..4)
        .map(|rank| start_process(rank, 4, port, LONG))
        .collect();
    for rank in ranks {
        let output = rank.wait_with_output().unwrap();
        assert!(output.status.success());
        let printed = String::from_utf8(output.stdout).unwrap();
        assert_eq!(printed, format!("{:?}", bytes(128)));
    }
}

/// Killed while it waits for rank 3, which never comes; so rank 2 is the lowest that is missing.
fn a_killed_process_is_named() {
    let port = free_port();
    let deadline = Duration::from_secs(2);
    let mut ranks: Vec<_> = (0..3)
        .map(|rank| start_process(rank, 4, port, deadline))
        .collect();
    thread::sleep(deadline / 4);
    ranks[2].kill().unwrap();
    for (rank, process) in ranks.into_iter().enumerate() {
        let output = process.wait_with_output().unwrap();
        if rank != 2 {
            let printed = String::from_utf8(output.stdout).unwrap();
            assert!(
                printed.starts_with("rank 2 did not come to the rendezvous at"),
                "{printed}"
            );
        }
    }
}
